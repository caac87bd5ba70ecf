"""How the site is built from docs/: `make docs`."""
