"""Container engines: for each, its facts (gather), its problems (problems), and its changes (plan)."""
