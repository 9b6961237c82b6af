"""Bundle to engine: plan, predict, compile."""

import edgellm.core  # noqa: F401 - it switches off the telemetry of libraries
