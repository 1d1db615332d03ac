"""eval=lm_eval placeholder"""
