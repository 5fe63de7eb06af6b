"""`covey selftest`: the exactness that covey promises, measured on the machine it runs on."""
