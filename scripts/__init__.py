"""Programs for a clone of the repository: the demo, its models, the docs generator."""

import edgellm.core  # noqa: F401 - it switches off the telemetry of libraries
