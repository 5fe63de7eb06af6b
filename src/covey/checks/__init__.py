"""Looks up the facts of a run, judges them and says what is wrong, before torch is imported; one module or
package has one subject."""
