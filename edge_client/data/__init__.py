"""Sources of samples (files, images, tables, arrays), how they are divided between devices, and how labels are
matched. Nothing is trained here, and no sample leaves the device from here.

May import: the leaves, config, wire.
"""
