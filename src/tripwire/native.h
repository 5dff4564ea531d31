/* What tripwire's C modules have in common. Included after Python.h. */

#ifdef Py_GIL_DISABLED
#error "the C modules need the GIL; their Python twins serve free-threaded builds"
#endif

#ifdef _MSC_VER
#define THREAD_LOCAL __declspec(thread)
#else
#define THREAD_LOCAL _Thread_local
#endif

/* The last slots of a module that only the main interpreter may import: its state is static. */
#if PY_VERSION_HEX >= 0x030C0000
#define LAST_SLOTS                                                                                 \
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED}, {0, NULL}
#else
#define LAST_SLOTS {0, NULL}
#endif

/* Make a class and put it into the module; -1 with an error. */
static inline int add_type(PyObject *module, PyType_Spec *spec) {
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    int failed = type == NULL || PyModule_AddType(module, (PyTypeObject *)type) < 0;
    Py_XDECREF(type);
    return failed ? -1 : 0;
}
