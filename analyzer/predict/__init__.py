"""Predictions by formula."""

from analyzer.predict.formula import predict

__all__ = ["predict"]
