// Links one library whole. The test is that it links and loads.
int main() { return 0; }
