"""Bundle to engine: plan, predict, compile."""
