"""A classifier of points on the plane."""
