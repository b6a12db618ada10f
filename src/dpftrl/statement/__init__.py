"""What people look at: plots, and pages made of them."""
