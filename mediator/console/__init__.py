"""The console: pages for operators, rendered here, and live by server-sent events; parts add pages of their own."""
