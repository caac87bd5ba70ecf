"""Questions, and the grids of runs that answer them."""
