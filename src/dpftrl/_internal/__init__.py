"""What several packages share and users never import."""
