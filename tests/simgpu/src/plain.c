/* A library of the driver that nothing in the simulation calls: it only has to exist, with its real soname. */
const char simgpu_plain[] = "simulated driver library";
