"""The cost model: memory and step time of plans, by formulas with sources. The arrays cover many plans at once. The
package uses NumPy and does not import torch."""
