"""Helpers that know nothing of attention: modules, torch functions, files, text, figures."""
