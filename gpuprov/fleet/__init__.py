"""The controller's side of a run over many hosts: inventory, SSH, the agent's zipapp, progress and reports."""
