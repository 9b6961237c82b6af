"""HTML pages of reports: one shell, tables and charts."""
