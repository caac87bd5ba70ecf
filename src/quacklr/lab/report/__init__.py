"""Reports from a ledger: figures, tables of claims and methods, and one HTML page."""
