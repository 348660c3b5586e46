"""What the scheduler runs beside the requests: releases, the clean-up, and the watch over the clock."""
