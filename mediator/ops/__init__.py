"""Operations: scheduler, clean-up, journal, control socket, doctor, metrics, run history."""
