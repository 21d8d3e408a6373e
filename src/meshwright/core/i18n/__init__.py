"""Contains the gettext catalogues that translate messages, and the names of terms. core/messages.py uses them."""
