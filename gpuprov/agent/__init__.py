"""One request on one host: run, resume, uninstall, the entry of the zipapp, what pushes and probes it."""
