"""What the backends of serving engines share."""
