/* vfork.c: vfork, counted, so that its child is known.
 *
 * The child shares all memory with its parent, whose thread waits until the child has called exec or ended: what it does to
 * its descriptors (subprocess closes and duplicates them there) must not be noted in the table. A function in C cannot
 * return twice from one frame, hence the few instructions. The caller's return address is kept in a register, as the C
 * library does it.
 */
#include <sys/syscall.h>
#include <unistd.h>

#include "preload/preload.h"

_Atomic int fsx_vforks;
static pid_t own_pid;

__attribute__((constructor)) static void note_pid(void) { own_pid = (pid_t)syscall(SYS_getpid); }

bool fsx_in_vfork(void) {
    if (atomic_load_explicit(&fsx_vforks, memory_order_relaxed) == 0)
        return false;
    return (pid_t)syscall(SYS_getpid) != own_pid;
}

/* In the child of a fork: the threads that waited for children of vforks are not here. */
void fsx_vfork_forked(void) {
    atomic_store(&fsx_vforks, 0);
    own_pid = (pid_t)syscall(SYS_getpid);
}

#if defined __x86_64__
__asm__(".text\n"
        ".globl vfork\n"
        ".type vfork, @function\n"
        "vfork:\n"
        "    .cfi_startproc\n"
        "    endbr64\n"
        "    lock incl fsx_vforks(%rip)\n"
        "    popq %rdi\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    .cfi_register %rip, %rdi\n"
        "    movl $58, %eax\n"
        "    syscall\n"
        "    pushq %rdi\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    testl %eax, %eax\n"
        "    je 1f\n"
        "    lock decl fsx_vforks(%rip)\n"
        "    cmpl $-4095, %eax\n"
        "    jae 2f\n"
        "1:  ret\n"
        "2:  negl %eax\n"
        "    pushq %rax\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    call __errno_location@PLT\n"
        "    popq %rcx\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    movl %ecx, (%rax)\n"
        "    movl $-1, %eax\n"
        "    ret\n"
        "    .cfi_endproc\n"
        ".size vfork, .-vfork\n");
#elif defined __aarch64__
/* clone(CLONE_VM | CLONE_VFORK | SIGCHLD) on the same stack. */
__asm__(".text\n"
        ".globl vfork\n"
        ".type vfork, %function\n"
        "vfork:\n"
        "    .cfi_startproc\n"
        "    adrp x9, fsx_vforks\n"
        "    add x9, x9, :lo12:fsx_vforks\n"
        "1:  ldaxr w10, [x9]\n"
        "    add w10, w10, #1\n"
        "    stlxr w11, w10, [x9]\n"
        "    cbnz w11, 1b\n"
        "    mov x0, #0x4111\n"
        "    mov x1, #0\n"
        "    mov x2, #0\n"
        "    mov x3, #0\n"
        "    mov x4, #0\n"
        "    mov x8, #220\n"
        "    svc #0\n"
        "    cbz x0, 3f\n"
        "2:  ldaxr w10, [x9]\n"
        "    sub w10, w10, #1\n"
        "    stlxr w11, w10, [x9]\n"
        "    cbnz w11, 2b\n"
        "    cmn x0, #4095\n"
        "    b.cs 4f\n"
        "3:  ret\n"
        "4:  neg x0, x0\n"
        "    stp x0, x30, [sp, #-16]!\n"
        "    bl __errno_location\n"
        "    ldp x1, x30, [sp], #16\n"
        "    str w1, [x0]\n"
        "    mov x0, #-1\n"
        "    ret\n"
        "    .cfi_endproc\n"
        ".size vfork, .-vfork\n");
#endif
