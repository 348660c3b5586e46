"""Operating the service: operations and who may run them, scheduler, control socket, admin API, audit log."""
