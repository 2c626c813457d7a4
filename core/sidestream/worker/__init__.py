"""What runs beside the device: forwards on one thread, outputs on another."""
