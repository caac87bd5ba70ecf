"""Helpers without knowledge of attention: modules, torch functions, files, text, figures."""
