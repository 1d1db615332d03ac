"""The one table of effects under claims, figures and pages: which runs make a pair, the mean difference, its word."""
