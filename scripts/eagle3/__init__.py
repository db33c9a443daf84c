"""The library that the stage scripts share. No Snakemake in it; nothing here runs on import."""
