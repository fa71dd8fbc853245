"""The model families that this project trains, for SGLang's registry (SGLANG_EXTERNAL_MODEL_PACKAGE).

SGLang imports each module of this package and takes its `EntryClass`; only then are its own model files, which import
every optional package of every model ever served, left alone until an unknown architecture is asked for.
"""
