// Rows of a table.
