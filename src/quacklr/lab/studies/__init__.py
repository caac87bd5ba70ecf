"""Studies: grids of runs, the claims that they test, and the statistics that decide them."""
