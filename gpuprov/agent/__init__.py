"""Run one request on one host: run, resume, uninstall, the zipapp's entry point, and push and probe code."""
