/* Tests of the registration of DMA-bufs. Few machines have a device that exports them, so this
 * program uses an anonymous file. It replaces fstatfs, which reports the file as a DMA-buf, and
 * ioctl, which counts synchronizations. The descriptor, its size and its mappings are real. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "pair.h"

enum { PAGE = 4096, SIZE = 8 * PAGE, DMA_BUF_MAGIC = 0x444d4142 };

struct mr_attributes {
	size_t length;
	int access;
	uint64_t comp_mask;
	uint64_t iova;
	void *addr;
	int fd;
	uint64_t fd_offset;
	void *dmah;
	void *buf;
};

struct ibv_mr *reg_mr_ex(struct ibv_pd *, struct mr_attributes *) __asm__("ibv_reg_mr_ex");

static _Atomic int pretend_dmabuf, begun, ended, sync_error;

int fstatfs(int fd, struct statfs *to)
{
	int got = syscall(SYS_fstatfs, fd, to);

	if (got == 0 && pretend_dmabuf)
		to->f_type = DMA_BUF_MAGIC;
	return got;
}

int fstatfs64(int fd, struct statfs64 *to)
{
	return fstatfs(fd, (struct statfs *)to);
}

int ioctl(int fd, unsigned long request, ...)
{
	va_list arguments;
	uint64_t *flags;

	va_start(arguments, request);
	flags = va_arg(arguments, uint64_t *);
	va_end(arguments);
	if (request != 0x40086200)
		return syscall(SYS_ioctl, fd, request, flags);
	if (sync_error) {
		errno = sync_error;
		return -1;
	}
	if (*flags & 4)
		ended++;
	else
		begun++;
	return 0;
}

static int count_mappings(const char *name)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	char line[512];
	int n = 0;

	NEED(maps);
	while (fgets(line, sizeof(line), maps))
		n += strstr(line, name) != NULL;
	fclose(maps);
	return n;
}

static int count_descriptors(void)
{
	int n = 0;

	for (int fd = 0; fd < 1024; fd++)
		n += fcntl(fd, F_GETFD) >= 0;
	return n;
}

static void test_invalid_registrations(int fd)
{
	int pipes[2];

	NEED(pipe(pipes) == 0);
	pretend_dmabuf = 0;
	IS_NULL(EBADF, ibv_reg_dmabuf_mr(pd, 0, SIZE, 0, -1, PAIR_ACCESS));
	/* An ordinary file is not a DMA-buf, even if it could be mapped. */
	IS_NULL(EINVAL, ibv_reg_dmabuf_mr(pd, 0, SIZE, 0, fd, PAIR_ACCESS));
	IS_NULL(EINVAL, ibv_reg_dmabuf_mr(pd, 0, SIZE, 0, pipes[0], PAIR_ACCESS));
	pretend_dmabuf = 1;
	IS_NULL(EINVAL, ibv_reg_dmabuf_mr(NULL, 0, SIZE, 0, fd, PAIR_ACCESS));
	IS_NULL(EINVAL, ibv_reg_dmabuf_mr(pd, 0, 0, 0, fd, PAIR_ACCESS));
	IS_NULL(EINVAL, ibv_reg_dmabuf_mr(pd, 0, SIZE + 1, 0, fd, PAIR_ACCESS));
	IS_NULL(EINVAL, ibv_reg_dmabuf_mr(pd, PAGE, SIZE, 0, fd, PAIR_ACCESS));
	IS_NULL(EINVAL, ibv_reg_dmabuf_mr(pd, UINT64_MAX, 2, UINT64_MAX, fd, PAIR_ACCESS));
	/* The offset within a page must be the same in `offset` and `iova`. */
	IS_NULL(EINVAL, ibv_reg_dmabuf_mr(pd, 8, PAGE, 0, fd, PAIR_ACCESS));
	IS_NULL(EINVAL, ibv_reg_dmabuf_mr(pd, 0, PAGE, 1, fd, PAIR_ACCESS));
	IS_NULL(EINVAL, ibv_reg_dmabuf_mr(pd, 0, PAGE, 0, fd, IBV_ACCESS_REMOTE_WRITE));
	for (int bit = 4; bit < 20; bit++)
		IS_NULL(EINVAL, ibv_reg_dmabuf_mr(pd, 0, PAGE, 0, fd, IBV_ACCESS_LOCAL_WRITE | 1 << bit));
	/* An exporter that does not support mapping. */
	IS_NULL(EOPNOTSUPP, ibv_reg_dmabuf_mr(pd, 0, 0x100, 0, open("/proc/self/exe", O_RDONLY),
		PAIR_ACCESS));
	sync_error = ENODEV;
	IS_NULL(ENODEV, ibv_reg_dmabuf_mr(pd, 0, PAGE, 0, fd, PAIR_ACCESS));
	sync_error = 0;
	close(pipes[0]);
	close(pipes[1]);
}

/* A peer writes and reads a buffer whose offset is not page-aligned. */
static void test_buffer(int fd, int by_attributes)
{
	const uint64_t offset = PAGE + 40, iova = 0x123000 + 40, length = 2 * PAGE;
	int before = count_mappings("memfd:dmabuf"), open_before = count_descriptors(), at_start = begun,
		at_end = ended;
	struct ibv_mr *buffer;
	char *mapped;
	struct pair p;

	NEED((mapped = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) != MAP_FAILED);
	memset(mapped, 0x33, SIZE);
	if (by_attributes) {
		struct mr_attributes a = { .length = length, .access = PAIR_ACCESS, .comp_mask = 1 | 4 | 8,
			.iova = iova, .fd = fd, .fd_offset = offset };

		buffer = reg_mr_ex(pd, &a);
	} else {
		buffer = ibv_reg_dmabuf_mr(pd, offset, length, iova, fd,
			PAIR_ACCESS | IBV_ACCESS_RELAXED_ORDERING);
	}
	NEED(buffer);
	CODE(at_start + 1, begun);
	CHECK((uintptr_t)buffer->addr == offset && buffer->length == length && buffer->pd == pd);
	CODE(before + 2, count_mappings("memfd:dmabuf"));
	create_pair(&p, IBV_QPT_RC, 0);
	to_init(p.qp[0]);
	to_init(p.qp[1]);
	connect_pair(&p);
	for (int i = 0; i < PAIR_SIZE; i++)
		memory[i] = i * 13;
	post_to(&p, IBV_WR_RDMA_WRITE, iova, buffer->rkey, length, IBV_SEND_SIGNALED);
	CODE(IBV_WC_SUCCESS, completion(p.cq[0]).status);
	CHECK(!memcmp(mapped + offset, memory, length));
	CHECK(mapped[offset - 1] == 0x33 && mapped[offset + length] == 0x33);
	mapped[offset + 5] = 0x44;
	post_to(&p, IBV_WR_RDMA_READ, iova + 5, buffer->rkey, 1, IBV_SEND_SIGNALED);
	CODE(IBV_WC_SUCCESS, completion(p.cq[0]).status);
	CODE(0x44, memory[0]);
	post_to(&p, IBV_WR_RDMA_WRITE, iova + 1, buffer->rkey, length, IBV_SEND_SIGNALED);
	CODE(IBV_WC_REM_ACCESS_ERR, completion(p.cq[0]).status);
	destroy_pair(&p);
	CODE(IBV_REREG_MR_ERR_INPUT, ibv_rereg_mr(buffer, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 0));
	CODE(0, ibv_dereg_mr(buffer));
	CODE(at_end + 1, ended);
	munmap(mapped, SIZE);
	CODE(before, count_mappings("memfd:dmabuf"));
	/* The first test also opens descriptors that the library keeps open. */
	if (by_attributes)
		CODE(open_before, count_descriptors());
}

int main(void)
{
	int fd = memfd_create("dmabuf", MFD_CLOEXEC);

	NEED(fd >= 0 && ftruncate(fd, SIZE) == 0);
	open_device();
	test_invalid_registrations(fd);
	test_buffer(fd, 0);
	test_buffer(fd, 1);
	/* Register without local write, and close the descriptor before deregistering. */
	int duplicate = dup(fd);
	struct ibv_mr *region = ibv_reg_dmabuf_mr(pd, 0, SIZE, 0, duplicate, IBV_ACCESS_REMOTE_READ);

	NEED(region);
	close(duplicate);
	CODE(0, ibv_dereg_mr(region));
	close_device();
	return result();
}
