"""Local training: workers that train alone and share a center at intervals."""
