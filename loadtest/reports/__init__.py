"""Reports as text, JSON, CSV and HTML."""
