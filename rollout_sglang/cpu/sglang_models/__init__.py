"""List the model families that this project trains, for SGLang's registry (SGLANG_EXTERNAL_MODEL_PACKAGE).

SGLang imports each module of this package and registers its `EntryClass`. Its own model files import every optional
package of every model: they are then imported only for an unknown architecture.
"""
