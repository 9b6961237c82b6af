"""`edgellm-eval`: an engine on datasets, plainly and speculating, and what came of it."""
