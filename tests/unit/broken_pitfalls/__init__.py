"""Pitfalls that the lab has to complain about."""
