"""Code that the backends of serving engines share."""
