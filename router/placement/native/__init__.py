"""A placement decision's two loops in C, called through ctypes; numpy says the same where there is no compiler."""
