"""Formats plans, estimates and records for people: tables of plans, and reports of one or several training runs. The
package does not import torch."""
