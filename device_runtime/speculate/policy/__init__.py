"""Policies of speculation: tree sizes, costs, budgets, acceptance rates."""
