/* Uses a part of the library. The first argument selects the part: "nothing" to an opened device or
 * the connection manager. With the second argument "child", the program first starts a child. */
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int count, char **words) {
	const char *mode = count > 1 ? words[1] : "";
	if (count > 2 && strcmp(words[2], "child") == 0) {
		if (fork() == 0)
			_exit(0);
		wait(NULL);
	}
	if (strcmp(mode, "cm") == 0) {
		struct rdma_cm_id *id;
		return rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP);
	}
	if (strcmp(mode, "nothing") == 0)
		return ibv_rate_to_mult(IBV_RATE_10_GBPS) != 4;
	struct ibv_device **list = ibv_get_device_list(NULL);
	if (!list || !list[0])
		return 1;
	if (strcmp(mode, "guid") == 0)
		return ibv_get_device_guid(list[0]) == 0;
	if (strcmp(mode, "open") == 0)
		return ibv_open_device(list[0]) == NULL;
	return 0;
}
