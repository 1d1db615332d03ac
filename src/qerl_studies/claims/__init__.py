"""How claims of papers are tested: contrasts and verdicts. A claim itself is conf/claim/NAME.yaml."""
