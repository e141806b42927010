"""runtime/drafters"""
