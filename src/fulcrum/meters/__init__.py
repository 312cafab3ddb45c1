"""What is measured: time and memory, and every place where the host waits for the device."""
