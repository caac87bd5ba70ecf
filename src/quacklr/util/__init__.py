"""Helpers that are independent of attention: modules, torch functions, files, text, figures."""
