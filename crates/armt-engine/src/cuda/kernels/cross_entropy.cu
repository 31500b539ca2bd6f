// Cross entropy over rows.
