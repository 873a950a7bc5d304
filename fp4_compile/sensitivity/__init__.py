"""How much each matmul minds being in NVFP4: static, calibrated, exact."""
