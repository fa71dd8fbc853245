"""`evenkeel repair`."""
