/* The sieve of observe.py: a profile function is called only for events that it acts on.

   Most events of a run are starts of code that was seen, returns, and calls of C functions that are
   known as pure. Python's own way to a profile function makes a dict of the locals of every frame
   before it can say so. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../native.h"

typedef struct {
    PyObject_HEAD
    PyObject *profile;      /* the function: for what isn't sifted out */
    PyObject *seen;         /* a dict whose keys are identities of code objects that were seen */
    PyObject *own;          /* a set of them: those whose calls go unjudged */
    PyObject *near_numpy;   /* a set of them: while it holds any, nothing is sifted out */
    PyObject *pure;         /* C functions */
    PyObject *pure_methods; /* those of classes, as (class, name) */
    int judges;             /* calls of C functions matter at all */
} Sieve;

static int is_code_in(PyObject *codes, PyFrameObject *frame) {
    PyCodeObject *code = PyFrame_GetCode(frame);
    PyObject *identity = PyLong_FromVoidPtr(code);
    Py_DECREF(code); /* the frame has it */
    if (identity == NULL) {
        return -1;
    }
    int found = PyDict_Check(codes) ? PyDict_Contains(codes, identity)
                                    : PySet_Contains(codes, identity);
    Py_DECREF(identity);
    return found;
}

static int is_pure(const Sieve *self, PyObject *callee) {
    int found = PySet_Contains(self->pure, callee);
    if (found != 0 || !PyCFunction_Check(callee)) {
        return found;
    }
    PyObject *owner = PyCFunction_GET_SELF(callee);
    PyObject *name = PyObject_GetAttrString(callee, "__name__");
    if (name == NULL) {
        return -1;
    }
    PyObject *key = PyTuple_Pack(2, Py_TYPE(owner != NULL ? owner : Py_None), name);
    Py_DECREF(name);
    if (key == NULL) {
        return -1;
    }
    found = PySet_Contains(self->pure_methods, key);
    Py_DECREF(key);
    return found;
}

/* Whether the profile function would do nothing; -1 with an error. */
static int is_sifted_out(const Sieve *self, PyFrameObject *frame, int what, PyObject *arg) {
    if (PySet_GET_SIZE(self->near_numpy) > 0) {
        return 0;
    }
    if (what == PyTrace_CALL) {
        return is_code_in(self->seen, frame);
    }
    if (what != PyTrace_C_CALL || !self->judges) {
        return 1;
    }
    int found = is_pure(self, arg);
    return found != 0 ? found : is_code_in(self->own, frame);
}

static const char *const event_names[] = {
    "call", "exception", "line", "return", "c_call", "c_exception", "c_return", "opcode",
};

/* As Python does: a profile function that raises goes. Its error stays: an audit hook that fails
   here, as one in Python does where no recursion is left, would end it. */
static void take_profile_out(void) {
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyEval_SetProfile(NULL, NULL);
    PyErr_Restore(type, error, traceback);
}

static int on_event(PyObject *self, PyFrameObject *frame, int what, PyObject *arg) {
    const Sieve *sieve = (Sieve *)self;
    int sifted = is_sifted_out(sieve, frame, what, arg);
    if (sifted == 1) {
        return 0;
    }
    PyObject *done = NULL;
    if (sifted == 0) {
        PyObject *profile = Py_NewRef(sieve->profile);
        done = PyObject_CallFunction(profile, "OsO", frame, event_names[what], arg ? arg : Py_None);
        Py_DECREF(profile);
    }
    if (done == NULL) {
        take_profile_out();
        return -1;
    }
    Py_DECREF(done);
    return 0;
}

static PyObject *sieve_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"profile", "seen",         "own",    "near_numpy",
                            "pure",    "pure_methods", "judges", NULL};
    PyObject *profile, *seen, *own, *near_numpy, *pure, *pure_methods;
    int judges;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!O!O!O!O!p", names, &profile, &PyDict_Type,
                                     &seen, &PySet_Type, &own, &PySet_Type, &near_numpy,
                                     &PySet_Type, &pure, &PySet_Type, &pure_methods, &judges)) {
        return NULL;
    }
    Sieve *self = (Sieve *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->profile = Py_NewRef(profile);
        self->seen = Py_NewRef(seen);
        self->own = Py_NewRef(own);
        self->near_numpy = Py_NewRef(near_numpy);
        self->pure = Py_NewRef(pure);
        self->pure_methods = Py_NewRef(pure_methods);
        self->judges = judges;
    }
    return (PyObject *)self;
}

/* For sys.setprofile(sys.getprofile()), which makes a Python profile function of it. */
static PyObject *sieve_call(Sieve *self, PyObject *args, PyObject *kwargs) {
    return PyObject_Call(self->profile, args, kwargs);
}

static int sieve_traverse(Sieve *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->profile);
    Py_VISIT(self->seen);
    return 0;
}

/* No tp_clear: whatever the profile function belongs to breaks the cycle. */
static void sieve_dealloc(Sieve *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->profile);
    Py_CLEAR(self->seen);
    Py_CLEAR(self->own);
    Py_CLEAR(self->near_numpy);
    Py_CLEAR(self->pure);
    Py_CLEAR(self->pure_methods);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyType_Slot sieve_slots[] = {
    {Py_tp_new, sieve_new},
    {Py_tp_call, sieve_call},
    {Py_tp_dealloc, sieve_dealloc},
    {Py_tp_traverse, sieve_traverse},
    {0, NULL},
};

static PyType_Spec sieve_spec = {
    .name = "tripwire.tracing._sieve.Sieve",
    .basicsize = sizeof(Sieve),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = sieve_slots,
};

/* ---- The module ------------------------------------------------------------------------------ */

/* sys.setprofile for a sieve. */
static PyObject *set_profile(PyObject *Py_UNUSED(module), PyObject *profile) {
    if (Py_TYPE(profile)->tp_call != (ternaryfunc)sieve_call) {
        PyErr_SetString(PyExc_TypeError, "set_profile() takes a sieve");
        return NULL;
    }
    PyEval_SetProfile(on_event, profile);
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"set_profile", set_profile, METH_O, "sys.setprofile, for a sieve."},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module) {
    return add_type(module, &sieve_spec);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    LAST_SLOTS,
};

static PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_sieve",
    .m_doc = "The sieve in C; observe.py specifies it.",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__sieve(void) {
    return PyModuleDef_Init(&module_def);
}
